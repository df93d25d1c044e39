"""What a person types: `elastic3d demo`, and each command of `elastic3d chaos`.

app           all commands of `elastic3d chaos` together
demo, score, listing, storm, random_storms, shrink, report, inject, soak
numbers       what their numbers have to be
"""
