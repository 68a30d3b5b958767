"""Chat templates and the formats of tool calls: from messages to token ids."""
