"""Losses as data: graphs of calls on an allow-list, read from JSON and run with bounded memory and time."""
