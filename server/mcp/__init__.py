"""A client of the Model Context Protocol (MCP), with which models call the tools of other programs."""
