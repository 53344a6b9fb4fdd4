"""The processes in which grammars run outside the engine, and the sockets to them."""
