"""`elastic3d top`: the terminal's page of a live job.

nodes      rows of the table of nodes, in an order that one may choose
picture    the page, for a terminal of any size
controls   what keys do: the order, the page
terminal   a terminal while a page has it: its keys, its size, and how it is given back
showing    the page in a terminal, kept up to date
command    the command
"""
