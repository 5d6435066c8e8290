"""Requests to servers: how they are sent, their messages, and their pictures."""
