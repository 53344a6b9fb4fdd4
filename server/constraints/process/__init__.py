"""The processes in which grammars run apart from the engine, and the sockets to them."""
