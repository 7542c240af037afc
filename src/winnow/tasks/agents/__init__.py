"""Agents that call the policy over HTTP, like any OpenAI-compatible server, and train it by their results."""

from .task import AgentConfig, AgentTask, with_agent

__all__ = ["AgentConfig", "AgentTask", "with_agent"]
