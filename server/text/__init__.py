"""Text processing around tokens: tokenizing, detokenizing, chat templates, tool calls, reasoning."""
