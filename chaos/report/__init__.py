"""What a person sees of runs, and what a machine reads.

facts, folder     what the folder of a run keeps; page: as one HTML page, with markup, style, moments,
                  timeline and plot
watching, view    jobs as a person watches them in the terminal, and the tables of how they went
random_documents  what became of drawn schedules, as `--json` prints it; junit: as build servers read it
early             what ends a command before its time
"""
