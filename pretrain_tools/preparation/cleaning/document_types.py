"""Defines the types of documents that `forms` detects. Each cleaning rule applies only to some of them."""

PARAGRAPHS, LINES, CODE, TABLE = range(4)
"""PARAGRAPHS: each line is a paragraph. LINES: hard-wrapped text, with sentences that span several lines. CODE: source
code. TABLE: rows of cells."""
