"""The style sheet of a trace's page: light and dark, nothing from elsewhere."""

STYLE = """
:root { color-scheme: light dark; --ground: #fbfbf9; --ink: #1d1f21; --faint: #6b7075; --rule: #d9dad6;
  --p0: #cfe8f5; --p1: #f3d6ee; --p2: #d5efd0; --p3: #dcdcfa; --outside: #e8e3d3; --recovered: #ffe08a;
  --bonus: #2f7d4f; --bar: #5b8fb0; }
@media (prefers-color-scheme: dark) { :root { --ground: #16181b; --ink: #e6e6e3; --faint: #9aa0a6; --rule: #34383d;
  --p0: #17455c; --p1: #56224c; --p2: #22502a; --p3: #34346e; --outside: #4a4433; --recovered: #7a5c00;
  --bonus: #7fd6a0; --bar: #6fa8cc; } }
body { margin: 2rem auto; max-width: 60rem; padding: 0 1rem; background: var(--ground); color: var(--ink);
  font: 16px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.3rem; } h2 { font-size: 1rem; margin-bottom: .3rem; } .faint { color: var(--faint); }
table { border-collapse: collapse; } th, td { padding: .15rem .9rem .15rem 0; text-align: right; font-weight: normal; }
th:first-child, td:first-child { text-align: left; } thead th { color: var(--faint); }
tbody tr { border-top: 1px solid var(--rule); }
.charts { display: flex; flex-wrap: wrap; gap: 1.5rem; } figure { margin: 0; } figcaption { color: var(--faint); }
svg { max-width: 100%; } svg text { font-size: 12px; fill: var(--ink); } svg .axis { stroke: var(--rule); }
svg .bar { fill: var(--bar); } svg .p0 { fill: var(--p0); } svg .p1 { fill: var(--p1); } svg .p2 { fill: var(--p2); }
svg .p3 { fill: var(--p3); } svg rect { stroke: var(--faint); stroke-width: .5; }
.text { white-space: pre-wrap; overflow-wrap: anywhere; line-height: 1.9; border-top: 1px solid var(--rule);
  padding-top: .5rem; }
.text span span, .legend span { border-radius: 3px; padding: .1em 0; } .legend span { padding: .1em .4em; }
.round:hover { outline: 1px solid var(--faint); border-radius: 3px; }
.p0 { background: var(--p0); } .p1 { background: var(--p1); } .p2 { background: var(--p2); }
.p3 { background: var(--p3); } .outside { background: var(--outside); } .recovered { background: var(--recovered); }
.bonus { border-bottom: 2px solid var(--bonus); border-radius: 0 !important; }
del { display: none; color: var(--faint); font-size: .8em; } #rejected:checked ~ main del { display: inline; }
"""
