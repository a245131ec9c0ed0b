"""The style of a trace's page: colours for light and dark, one column that a phone can show."""

from __future__ import annotations

from typing import Final

STYLE: Final = """
:root {
  --ground: #ffffff; --text: #1b1f24; --muted: #59636e; --rule: #d8dde3;
  --compute: #4473a8; --compute-odd: #86abd6; --write: #1f8a7d; --both: #32809a;
  --import: #d9691a; --parked: #cfc7b3;
  --neighbour: #8257ad; --decode: #558b2f; --drain: #9aa1a9; --messages: #c39a00;
  --rest: #7d858e; --tail: rgba(214, 58, 58, 0.13);
  --final: #d1242f; --published: #1a7f37; --first-token: #0969da; --cancel: #1b1f24;
}
@media (prefers-color-scheme: dark) {
  :root {
    --ground: #15181c; --text: #e6e9ec; --muted: #9ba5b0; --rule: #363d46;
    --compute: #5f97d6; --compute-odd: #37618f; --write: #45bfb0; --both: #4fa9c6;
    --import: #f2944a; --parked: #5c563f;
    --neighbour: #b28be0; --decode: #8cc765; --drain: #6b737c; --messages: #e2bd3a;
    --rest: #8b949e; --tail: rgba(255, 110, 110, 0.2);
    --final: #ff7b72; --published: #56d364; --first-token: #79b8ff; --cancel: #ffffff;
  }
}
* { box-sizing: border-box; }
body {
  margin: 0 auto; padding: 1rem; max-width: 72rem; background: var(--ground);
  color: var(--text); font: 15px/1.45 system-ui, sans-serif; overflow-wrap: anywhere;
}
h1 { font-size: 1.3rem; }
h2 { font-size: 1.1rem; border-top: 1px solid var(--rule); padding-top: 1rem; }
figure { margin: 1rem 0; }
figcaption, caption { color: var(--muted); text-align: left; padding-bottom: 0.3rem; }
.lanes { display: flex; }
.labels { position: relative; flex: 0 0 7.4rem; font-size: 12px; color: var(--muted); }
.labels span { position: absolute; left: 0; line-height: 18px; }
.drawing { flex: 1 1 auto; min-width: 0; }
svg { display: block; width: 100%; overflow: hidden; border-left: 1px solid var(--rule);
  border-right: 1px solid var(--rule); }
rect, line { vector-effect: non-scaling-stroke; }
rect { stroke-width: 1px; }
.compute { fill: var(--compute); stroke: var(--compute); background: var(--compute); }
.compute.odd { fill: var(--compute-odd); stroke: var(--compute-odd); }
.write { fill: var(--write); stroke: var(--write); background: var(--write); }
.write.both { fill: var(--both); stroke: var(--both); background: var(--both); }
.import, .importing { fill: var(--import); stroke: var(--import); background: var(--import); }
.parked { fill: var(--parked); stroke: var(--parked); background: var(--parked); }
.neighbour, .neighbours {
  fill: var(--neighbour); stroke: var(--neighbour); background: var(--neighbour);
}
.decode { fill: var(--decode); stroke: var(--decode); background: var(--decode); }
.drain { fill: var(--drain); stroke: var(--drain); background: var(--drain); }
.device { fill-opacity: 0.45; stroke-dasharray: 4 2; }
.part.source { fill: var(--compute); stroke: var(--compute); background: var(--compute); }
.part.messages { fill: var(--messages); stroke: var(--messages); background: var(--messages); }
.part.rest { fill: var(--rest); stroke: var(--rest); background: var(--rest); }
.tail { fill: var(--tail); stroke: none; background: var(--tail); }
.message { stroke: var(--messages); stroke-width: 1px; }
.announced, .validated { stroke: var(--text); stroke-width: 1px; }
.mark { stroke-width: 2px; }
.mark.granted { stroke: var(--muted); background: var(--muted); }
.mark.final { stroke: var(--final); background: var(--final); }
.mark.published { stroke: var(--published); background: var(--published); }
.mark.first_token { stroke: var(--first-token); background: var(--first-token); }
.mark.cancel { stroke: var(--cancel); background: var(--cancel); stroke-dasharray: 5 3; }
.mark.ended { stroke: var(--muted); background: var(--muted); stroke-dasharray: 2 3; }
.axis { position: relative; height: 1.4rem; font-size: 12px; color: var(--muted); }
.axis span { position: absolute; transform: translateX(-50%); white-space: nowrap; }
.legend { list-style: none; padding: 0; display: flex; flex-wrap: wrap; gap: 0.2rem 1.2rem;
  font-size: 13px; }
.legend i { display: inline-block; width: 14px; height: 12px; margin-right: 6px; }
.legend i.device { opacity: 0.55; border: 1px dashed var(--text); }
.legend i.mark { width: 3px; height: 14px; vertical-align: -2px; }
.legend i.mark.cancel { background: none; border-left: 3px dashed var(--cancel); }
.legend i.mark.ended { background: none; border-left: 3px dotted var(--muted); }
table { border-collapse: collapse; margin: 1rem 0; font-size: 14px; }
th, td { text-align: left; vertical-align: top; padding: 0.25rem 0.8rem 0.25rem 0;
  border-top: 1px solid var(--rule); font-weight: normal; }
th { color: var(--muted); min-width: 7rem; }
.number { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
footer { color: var(--muted); font-size: 12px; border-top: 1px solid var(--rule);
  padding-top: 0.5rem; }
"""
