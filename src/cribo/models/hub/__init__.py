"""Weights on the Hugging Face hub: downloads, model cards, and publication."""
