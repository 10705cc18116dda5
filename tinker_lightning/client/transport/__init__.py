"""Requests over HTTP: connections, sessions, operations from submission to result, and retries."""
