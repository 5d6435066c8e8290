"""The style sheet of reports: light and dark, for phones and desktops. It loads nothing."""

from lockstep.report.page.drawing import COLORS
from lockstep.report.page.rollouts import STYLE as PICTURES

STYLE = """
:root { color-scheme: light dark; --page: #fbfbfa; --card: #ffffff; --ink: #1c1d1f; --dim: #62666d; --edge: #dedfe2;
  --good: #167a3b; --good-back: #def3e4; --near: #8a5a00; --near-back: #fdf0cf; --bad: #b3261e; --bad-back: #fbe4e2;
  --grey: #eeeff2; --c0: #2f62d9; --c1: #c2620a; --c2: #13855f; --c3: #8b3fc4; --c4: #c02f63; --c5: #0e7f9c;
  --c6: #7a6a00; --c7: #6b6f78; }
@media (prefers-color-scheme: dark) { :root { --page: #15171a; --card: #1d2024; --ink: #e6e7e9; --dim: #9ea3ab; --edge: #363a40;
  --good: #6fd396; --good-back: #17351f; --near: #f0c060; --near-back: #3a2f10; --bad: #ff8f86; --bad-back: #431c19;
  --grey: #292c31; --c0: #86a8ff; --c1: #f0a04e; --c2: #56c99c; --c3: #c593f2; --c4: #f587ab;
  --c5: #5ccbe4; --c6: #d6c75a; --c7: #a7abb3; } }
* { box-sizing: border-box; }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 1280px; margin: 0 auto; padding: 1em;
  background: var(--page); color: var(--ink); }
h1 { font-size: 1.5em; margin: .3em 0; overflow-wrap: anywhere; } h2 { font-size: 1.2em; margin: 1.6em 0 .5em; }
h3 { font-size: 1em; }
small { color: var(--dim); } code { font-size: .9em; overflow-wrap: anywhere; } a { color: var(--c0); }
.verdict { border-radius: 8px; padding: .7em 1em; font-size: 1.1em; font-weight: 600; border: 1px solid; overflow-wrap: anywhere; }
.verdict small { display: block; font-weight: 400; color: inherit; }
.verdict.good { background: var(--good-back); color: var(--good); }
.verdict.near { background: var(--near-back); color: var(--near); }
.verdict.bad { background: var(--bad-back); color: var(--bad); }
.failure { border: 1px solid var(--bad); border-radius: 8px; padding: 0 1em 1em; margin-top: 1em; background: var(--card); }
.tiles { display: flex; flex-wrap: wrap; gap: .5em; margin: 1em 0; } .tiles i { font-style: normal; white-space: nowrap; }
.tiles div { flex: 1 1 auto; background: var(--card); border: 1px solid var(--edge); border-radius: 8px; padding: .5em .7em; }
.tiles b { display: block; font-size: 1.05em; overflow-wrap: anywhere; }
.charts { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(340px, 100%), 1fr)); gap: .8em; }
figure { margin: 0; background: var(--card); border: 1px solid var(--edge); border-radius: 8px; padding: .6em; min-width: 0; }
figcaption { font-weight: 600; } figcaption small { font-weight: 400; } svg { width: 100%; height: auto; display: block; }
svg text { fill: var(--dim); font-size: 12px; } .grid { stroke: var(--edge); } .h { fill: transparent; }
.h:hover { fill: var(--dim); fill-opacity: .13; } .limit { stroke: var(--bad); stroke-dasharray: 5 4; stroke-width: 1.5; }
polyline { fill: none; stroke-width: 2; stroke-linejoin: round; }
.legend { font-size: .85em; color: var(--dim); } .legend span { margin-right: 1em; white-space: nowrap; }
.legend i { display: inline-block; width: .8em; height: .8em; border-radius: 2px; margin-right: .35em; }
.wide { overflow-x: auto; } table { border-collapse: collapse; width: 100%; background: var(--card); font-size: .93em; }
td, th { border-bottom: 1px solid var(--edge); padding: .35em .6em; text-align: left; vertical-align: top; }
th { color: var(--dim); font-weight: 600; } .said { white-space: pre-wrap; overflow-wrap: anywhere; min-width: 9em; }
.different { background: var(--near-back); }
.proofs { min-width: 56em; } .proofs code, .proofs .figure { white-space: nowrap; } .evaluations td { min-width: 14em; }
@media (max-width: 600px) { .evaluations th { display: none; } .evaluations tr { display: block; padding: .5em 0; }
  .evaluations td { display: block; border: 0; min-width: 0; padding: .2em .4em; }
  .evaluations td::before { content: attr(data-name); display: block; color: var(--dim); font-weight: 600; }
  .proofs { min-width: 0; } .proofs th { display: none; } .proofs .figure::before { content: "limit "; color: var(--dim); }
  .proofs tr { display: grid; grid-template-columns: 1fr auto auto; padding: .4em 0; border-bottom: 1px solid var(--edge); }
  .proofs td { border: 0; padding: .1em .4em; } .proofs td:nth-child(1), .proofs td:nth-child(2), .proofs td:nth-child(6) {
    grid-column: 1 / -1; } .proofs td:nth-child(6) { color: var(--dim); min-width: 0; } }
.meter { display: block; height: 5px; border-radius: 3px; background: var(--grey); margin-top: 3px; min-width: 70px; }
.meter span { display: block; height: 100%; border-radius: 3px; background: var(--good); }
.meter .near { background: var(--near); } .meter .bad { background: var(--bad); }
.goodtext { color: var(--good); } .badtext { color: var(--bad); }
details { border: 1px solid var(--edge); border-radius: 8px; padding: .4em .8em; margin: .5em 0; background: var(--card); }
summary { cursor: pointer; } .rollout { border-top: 1px solid var(--edge); padding: .6em 0; overflow-wrap: anywhere; }
.rollout:first-of-type { border-top: 0; } pre { white-space: pre-wrap; margin: .15em 0 .5em; font-size: 13px; line-height: 1.6; }
pre i, .scale i { font-style: normal; border-radius: 2px; } .scale i { padding: 0 .35em; display: inline-block; }
.scale { margin: .3em 0; }
.inserted { background: var(--grey); color: var(--dim); border-radius: 4px; padding: .2em .4em; }
.score { border-radius: 4px; padding: 0 .4em; font-size: .9em; font-variant-numeric: tabular-nums; }
.re, .rn { background: var(--grey); color: var(--dim); }
.switch { position: sticky; top: 0; background: var(--page); padding: .4em 0; z-index: 1; } .switch label { margin-right: 1em; }
body:has(#advantage:checked) .by-gap, body:has(#gap:checked) .by-advantage { display: none; }
"""  # noqa: E501

_CURVES = {".d": "fill", ".c": "stroke", ".legend i.k": "background"}


def _colors() -> str:
    """The rules with one color per number (curves, ranks, gaps, advantages), mixed with the card for both themes."""
    rules = []
    for n in range(COLORS):
        rules += [f"{kind}{n} {{ {what}: var(--c{n}); }}" for kind, what in _CURVES.items()]
    for n, (color, part) in enumerate((("bad", 45), ("bad", 20), ("near", 25), ("good", 20), ("good", 45))):
        rules.append(f".r{n} {{ background: color-mix(in srgb, var(--{color}) {part}%, var(--card)); }}")
    for n in range(8):
        color = "good" if n < 3 else "near" if n < 6 else "bad"
        part = (8, 13, 18, 14, 23, 32, 40, 60)[n]
        mixed = f"color-mix(in srgb, var(--{color}) {part}%, var(--card))"
        rules.append(f"body:has(#gap:checked) pre .g{n}, .by-gap .g{n} {{ background: {mixed}; }}")
    for n in range(9):
        color, part = "good" if n > 4 else "bad", abs(n - 4) * 14
        mixed = f"color-mix(in srgb, var(--{color}) {part}%, var(--card))"
        where = f"body:has(#advantage:checked) pre .a{n}, .by-advantage .a{n}"
        rules.append(f"{where} {{ background: {mixed}; }}")
    return "\n".join(rules)


STYLE += PICTURES + _colors()
