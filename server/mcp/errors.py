"""Errors of calls to MCP servers.

McpError          a call failed; the message names the server
  McpRefused      the server answered with an error of JSON-RPC, or speaks no version of MCP that this client knows
  McpLost         the server does not start, ended, closed the connection, cannot or may not be reached, or sent something that is not MCP
                  or is too large
    McpStatus     the server answered with an HTTP status that is no success
  McpStopped      the call was cancelled, took too long, or was not begun because too many others wait
"""

from __future__ import annotations


class McpError(Exception):
    pass


class McpRefused(McpError):
    def __init__(self, message: str, code: int, data: object = None) -> None:
        super().__init__(message)
        self.code = code
        self.data = data


class McpLost(McpError):
    pass


class McpStatus(McpLost):
    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


class McpStopped(McpError):
    pass
