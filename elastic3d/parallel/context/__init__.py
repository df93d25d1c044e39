"""Long sequences cut into chunks: which rank computes which of them, and how attention reaches beyond its own."""
