"""Text around tokens: tokenizing, detokenizing, chat templates, tool calls, reasoning."""
