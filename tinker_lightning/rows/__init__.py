"""Rows of datasets (texts, chats and dicts) as datums, pairs and prompts."""
