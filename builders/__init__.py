"""The room that knows all others: schemas, rules across groups, and what puts the parts of a program
together.
"""
