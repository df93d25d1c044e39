"""One page about what became of a run: what `elastic3d report` writes, from its folder of events alone. Pure.

document     what the page shows, frozen; as JSON what `--json` prints
making       the document of a run
shares       the categories of a node's time, as few bands as can be seen
checkpoints  the checkpoints of a run, and what failed of them
timelines    rows of what the time of nodes went to, as SVG
page         the document as HTML, made of the parts of `elastic3d.pages`
sections     the sections of that page
"""
