"""Build ages of groups in a buffer."""

from __future__ import annotations

from winnow.types import Group


def oldest(group: Group, version: int) -> int:
    versions = [int(r.versions[r.action_mask].min()) for r in group.rollouts if r.action_mask.any()]
    return min(versions, default=version)
