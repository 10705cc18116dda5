"""The official SDK's objects: its datums, futures and clients used in place of ours."""
