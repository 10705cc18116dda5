"""Adapters for clients of the official SDK and of other vendors."""
