"""Where the time of a run's nodes went, from its event files alone: pure functions, without files and clocks.

recorded_events  one line of an event file, and what may be relied on in it
node_lives       a node's events, from a keeper's start to its end
clock_offsets    by how much the wall clocks of the nodes differ
past_steps       the steps of a generation, and what slow ranks cost them
past_run         the generations of a run, their steps, and how each ended
spans            time cut into spans that have a category each
node_spans       the spans of each node
recoveries       what came before the first step of each generation
goodput          their sums, and the shares that are made of them
nesting          slices of a timeline that lie in each other, or apart
trace            the same as a timeline, in the Trace Event Format
"""
