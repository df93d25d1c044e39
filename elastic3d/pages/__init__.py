"""What the pages about a job are made of, whether it is live (`dashboard`) or over (`report`). Pure.

markup       HTML in which everything is escaped that is not said to be HTML
template     the style of all pages, and how values are put into a page
generations  the rows of the table of generations
findings     what was found, each with the page that `elastic3d explain` prints
series       loss and seconds of steps, in bounded memory
plots        curves as SVG that fits any width
curves       those of a run by its steps
tensors      the rows of a comparison of two checkpoints
"""
