"""Build the processes of samplers."""

from __future__ import annotations

from winnow.base.forkserver import Forked
from winnow.sampler.handle import SamplerHandle
from winnow.sampler.processes import Pipe


def process_of(member: SamplerHandle) -> Forked:
    assert isinstance(member.channel, Pipe)
    return member.channel.process
