"""The cells as one program: parsed once, its names and data flow, where a constant is written, and edits of it."""
