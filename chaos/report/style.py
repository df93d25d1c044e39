"""How the report looks: light or dark as its reader has it, from a phone's width on."""

from __future__ import annotations

STYLE = """
:root { color-scheme: light dark; --font: system-ui, -apple-system, "Segoe UI", "DejaVu Sans", sans-serif;
  --paper: #ffffff; --ink: #1c2430; --dim: #5d6878; --rule: #d5dae1; --faint: #f3f5f8;
  --good: #1a7f4b; --bad: #c62f2f; --warn: #96660a; --goodback: #e7f5ec; --badback: #fdeceb; --warnback: #fdf3dc;
  --g0: #3b73c4; --g1: #1f8a7d; --g2: #8259b5; --g3: #7b8427; --g4: #2787a8; --g5: #96684e; --g6: #b0548a;
  --g7: #5f7389;
  --fault: #c62f2f; --verdict: #d98a00; --saved: #1a7f4b; --forming: rgba(255,255,255,.55);
  --shade: rgba(198,47,47,.13); }
@media (prefers-color-scheme: dark) { :root {
  --paper: #12161c; --ink: #e3e8ef; --dim: #9aa6b5; --rule: #343d49; --faint: #1b212a;
  --good: #5cc98d; --bad: #ff7b72; --warn: #e3b04b; --goodback: #14301f; --badback: #3a1a1b; --warnback: #35290f;
  --g0: #4f86d6; --g1: #2b9c8e; --g2: #946bc8; --g3: #8b9433; --g4: #3699ba; --g5: #a9795e; --g6: #c3669c;
  --g7: #71869d;
  --fault: #e0524a; --verdict: #f0a92e; --saved: #5cc98d; --forming: rgba(18,22,28,.5);
  --shade: rgba(255,123,114,.2); } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 1120px; padding: 24px 20px 64px; background: var(--paper); color: var(--ink);
  font: 15px/1.5 var(--font); }
h1 { font-size: 23px; line-height: 1.3; margin: 0; } h2 { font-size: 18px; margin: 38px 0 10px; }
code, pre { font-family: ui-monospace, "DejaVu Sans Mono", Menlo, Consolas, monospace; font-size: 13px; }
code { overflow-wrap: anywhere; } td code { white-space: nowrap; }
pre { background: var(--faint); padding: 10px 12px; border-radius: 6px; overflow-x: auto; }
details > pre { max-height: 420px; overflow: auto; } summary { cursor: pointer; }
.verdict-box { border-left: 6px solid var(--edge); background: var(--back); padding: 14px 18px; border-radius: 6px; }
.good { --edge: var(--good); --back: var(--goodback); } .bad { --edge: var(--bad); --back: var(--badback); }
.warn { --edge: var(--warn); --back: var(--warnback); }
.verdict-box ul { margin: 8px 0 0; padding-left: 20px; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: 2px 18px; margin: 18px 0; }
dt { color: var(--dim); } dd { margin: 0; overflow-wrap: anywhere; }
table { border-collapse: collapse; width: 100%; font-size: 14px; }
th { text-align: left; font-weight: 600; color: var(--dim); border-bottom: 2px solid var(--rule);
  padding: 6px 10px 6px 0; }
td { vertical-align: top; border-bottom: 1px solid var(--rule); padding: 7px 10px 7px 0; }
.long td { overflow-wrap: anywhere; } td .small { overflow-wrap: break-word; }
.tag { display: inline-block; padding: 0 8px; border-radius: 9px; font-size: 13px; font-weight: 600;
  white-space: nowrap; color: var(--edge); background: var(--back); border: 1px solid var(--edge); }
.small { font-size: 13px; color: var(--dim); }
svg { display: block; max-width: 100%; height: auto; }
svg text { fill: var(--ink); font: 12px var(--font); }
.narrow { display: none; }
.rule { stroke: var(--rule); } .absent { stroke: var(--rule); stroke-dasharray: 2 4; }
.steps { fill: none; stroke: var(--dim); stroke-width: 1.3; } .again { opacity: .45; }
.recovery { fill: var(--shade); }
.g0 { fill: var(--g0); } .g1 { fill: var(--g1); } .g2 { fill: var(--g2); } .g3 { fill: var(--g3); }
.g4 { fill: var(--g4); } .g5 { fill: var(--g5); } .g6 { fill: var(--g6); } .g7 { fill: var(--g7); }
rect.spare { fill-opacity: .28; stroke: var(--dim); stroke-dasharray: 3 2; } rect.coming { fill-opacity: .45; }
.forming { fill: var(--forming); pointer-events: none; }
svg text.on { fill: #ffffff; font-weight: 600; font-size: 11.5px; pointer-events: none; }
.fault { fill: var(--fault); stroke: var(--paper); stroke-width: 1.5; }
.leader { stroke: var(--fault); stroke-width: 2; }
path.verdict { fill: var(--verdict); stroke: var(--paper); }
.notice { fill: var(--paper); stroke: var(--ink); stroke-width: 1.6; }
path.saved { fill: var(--saved); }
.legend { display: flex; flex-wrap: wrap; gap: 4px 18px; list-style: none; margin: 8px 0 0; padding: 0;
  color: var(--dim); font-size: 13px; }
.legend li { display: flex; align-items: center; gap: 6px; } .legend svg { flex: none; }
.loss rect { fill: var(--paper); } .loss text { fill: var(--ink); } .loss line { stroke: var(--rule); }
.loss line[stroke-dasharray] { stroke: var(--dim); } .loss polyline { stroke: var(--g0); }
.loss polyline[stroke-width="6"] { stroke: var(--verdict); }
.growth { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 420px), 1fr)); gap: 12px; }
.growth line { stroke: var(--rule); } .growth polyline { fill: none; } .growth text.grows { fill: var(--bad); }
.growth polyline.grows { stroke: var(--bad); }
.growth polyline.g0 { stroke: var(--g0); } .growth text.g0 { fill: var(--g0); }
.growth polyline.g1 { stroke: var(--g1); } .growth text.g1 { fill: var(--g1); }
.growth polyline.g2 { stroke: var(--g2); } .growth text.g2 { fill: var(--g2); }
.growth polyline.g3 { stroke: var(--g3); } .growth text.g3 { fill: var(--g3); }
.growth polyline.g4 { stroke: var(--g4); } .growth text.g4 { fill: var(--g4); }
.growth polyline.g5 { stroke: var(--g5); } .growth text.g5 { fill: var(--g5); }
.growth polyline.g6 { stroke: var(--g6); } .growth text.g6 { fill: var(--g6); }
.growth polyline.g7 { stroke: var(--g7); } .growth text.g7 { fill: var(--g7); }
path.done { stroke: var(--fault); stroke-width: 1.2; fill: none; }
@media (max-width: 720px) {
  body { padding: 14px 12px 48px; } h1 { font-size: 19px; } .wide { display: none; } .narrow { display: block; }
  dl { grid-template-columns: 1fr; } dd { margin-bottom: 6px; }
  table, tbody, tr, td { display: block; } thead { display: none; } .narrow svg { width: 100%; }
  tr { border: 1px solid var(--rule); border-radius: 8px; padding: 6px 12px; margin-bottom: 10px; }
  td { border: 0; padding: 3px 0 3px 104px; position: relative; overflow-wrap: anywhere; } td:empty { display: none; }
  td[data-label=""] { padding-left: 0; }
  td::before { content: attr(data-label); position: absolute; left: 0; width: 96px; color: var(--dim); }
  td code { white-space: normal; } }
@media print { body { max-width: none; } }
"""
