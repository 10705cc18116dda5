"""Losses as data: graphs of calls from an allow-list, read from JSON and run within bounds of memory and time."""
