"""Files that must type-check against the public API, or must not."""
