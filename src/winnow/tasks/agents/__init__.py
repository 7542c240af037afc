"""Agents that ask the policy over HTTP, as any OpenAI-compatible server, and train it by what they do."""

from .task import AgentConfig, AgentTask, with_agent

__all__ = ["AgentConfig", "AgentTask", "with_agent"]
