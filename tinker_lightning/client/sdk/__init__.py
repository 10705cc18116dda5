"""Adapters for the official SDK's datums, futures and clients."""
