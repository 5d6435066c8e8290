"""How a conversation grows in ids: what follows a sampled turn, and which tool calls it holds."""
