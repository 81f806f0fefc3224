"""Asyncio helpers: tasks, and synchronous calls of asynchronous code."""
