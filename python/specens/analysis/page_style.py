"""The style sheet of a trace's page: light and dark, narrow and wide, nothing from elsewhere."""

STYLE = """
:root { color-scheme: light dark; --ground: #fbfbf9; --ink: #1d1f21; --faint: #63686d; --rule: #d9dad6;
  --member: 60% 86%; --outside: #e8e3d3; --recovered: #ffe08a; --bonus: #2f7d4f; --bar: #5b8fb0; }
@media (prefers-color-scheme: dark) { :root { --ground: #16181b; --ink: #e6e6e3; --faint: #a1a7ad; --rule: #34383d;
  --member: 45% 27%; --outside: #4a4433; --recovered: #7a5c00; --bonus: #7fd6a0; --bar: #6fa8cc; } }
* { box-sizing: border-box; }
body { margin: 1.5rem auto; max-width: 60rem; padding: 0 1rem; background: var(--ground); color: var(--ink);
  font: 16px/1.5 system-ui, sans-serif; overflow-wrap: anywhere; }
h1 { font-size: 1.3rem; } h2 { font-size: 1rem; margin-bottom: .3rem; } .faint { color: var(--faint); }
table { border-collapse: collapse; } th, td { text-align: right; font-weight: normal; vertical-align: top; }
.members th, .members td { padding: .15rem 0 .15rem .8rem; overflow-wrap: normal; }
.members th:first-child, .members td:first-child { text-align: left; padding-left: 0; overflow-wrap: anywhere; }
.members thead th { color: var(--faint); } .members tbody tr { border-top: 1px solid var(--rule); }
@media (max-width: 40rem) { .members, .members tbody, .members thead { display: block; }
  .members tr { display: grid; grid-template-columns: repeat(5, 1fr); font-size: .85rem; }
  .members th:first-child, .members td:first-child { grid-column: 1 / -1; font-size: 1rem; } }
.charts { margin: 1.2rem 0; display: grid; gap: 1.5rem;
  grid-template-columns: repeat(auto-fit, minmax(min(22rem, 100%), 1fr)); }
figure { margin: 0; } figcaption { color: var(--faint); } .bars { width: 100%; font-size: .85rem; }
.bars th { max-width: 11rem; padding-right: .6rem; } .bars td { padding: .15rem 0; }
.bars td:nth-child(2) { width: 50%; }
.bars td:last-child { text-align: left; padding-left: .5rem; white-space: nowrap; }
.bar { display: block; height: 1.1em; border-radius: 2px; outline: 1px solid var(--rule); }
.bar.plain { background: var(--bar); }
.text { white-space: pre-wrap; line-height: 1.9; border-top: 1px solid var(--rule); padding-top: .5rem; }
.text span span, .legend span { border-radius: 3px; padding: .1em 0; } .legend span { padding: .1em .4em; }
.legend { line-height: 2; } .round:hover { outline: 1px solid var(--faint); border-radius: 3px; }
.outside { background: var(--outside); } .recovered { background: var(--recovered); }
.bonus { border-bottom: 2px solid var(--bonus); border-radius: 0 !important; }
del { display: none; color: var(--faint); font-size: .8em; } #rejected:checked ~ main del { display: inline; }
"""
GOLDEN_ANGLE = 137.5  # degrees between hues: however many there are, they stay apart


def style_sheet(num_members: int) -> str:
    """The style sheet with a colour for each member: class p0 for the first."""
    hues = [(200 + GOLDEN_ANGLE * index) % 360 for index in range(num_members)]
    return STYLE + "".join(
        f".p{index} {{ background: hsl({hue:.0f} var(--member)); }}\n" for index, hue in enumerate(hues)
    )
