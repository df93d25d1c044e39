"""Schedules by the thousand, in virtual time: drawn from seeds, played, and the failing ones made small.

runs          the totals, and a minimised schedule of each failure; shrinking: by trying smaller ones
cli           progress, a report or one JSON document
"""
