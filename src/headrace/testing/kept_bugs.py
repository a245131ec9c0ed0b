"""Bugs of hand-offs whose prompt the decoder has kept, in part or all."""

from __future__ import annotations

from typing import Final

KEPT_BUGS: Final = r"""
[Handoff.needs_source]
kept-first: a part that is kept is taken for all
    self.start < self.num_tokens => self.start == 0
kept: nothing is ever kept
    self.start < self.num_tokens => True
[Handoff._settle]
kept: storage alone seals nothing
    (HandoffState.STREAMING, HandoffState.RESERVED) => (HandoffState.STREAMING,)
[Handoff.TABLE]
kept: a hand-off without a source cannot be sealed
    RESERVED SEAL =>
kept: it is streaming although nobody sends
    RESERVED SEAL => STREAMING
[Grants._admit_storage]
kept: nobody publishes what needs no source
    or not handoff.needs_source => or False
[Grants._fits]
kept-between: a slot goes to one that needs none
    if not handoff.needs_source: => if False:
[Grants._fail_stranded]
kept-gone: who needs no source fails with the last one
    elif not handoff.needs_source: => elif False:
[Grants._lease]
kept-first: the source is asked for what is kept
    handoff.num_tokens, handoff.start => handoff.num_tokens, 0
[Endings._go_on]
kept-first: the next attempt begins at the first position
    start=old.start => start=0
[Endings._publish_if_ready]
kept-first: it is published as if nobody had sent anything
    handoff.source, slot, handoff.token => None, None, handoff.token
[Owner.submit]
kept: what is kept is forgotten
    local=local, start=start => local=local
kept-gone: what needs no source is refused without one
    if unserved and start < num_tokens: => if unserved:
kept-lost: a prompt that is kept needs no lane either
    if self.no_lane_left: => if self.no_lane_left and start < num_tokens:
[Owner.published]
kept: a slot that it never had is given back
    if handoff.lease is not None: => if True:
one: the slot is never given back
    if handoff.lease is not None: => if False:
"""
