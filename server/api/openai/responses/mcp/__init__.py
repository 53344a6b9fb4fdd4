"""Tools of MCP servers in OpenAI's /v1/responses: this server calls them."""
