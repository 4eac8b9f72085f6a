"""The ground floor: files and locks, which know nothing of this project's subject and import none of its
rooms.
"""
