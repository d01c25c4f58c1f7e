"""The pictures of the documentation: ``python -m tests.docs.pictures`` makes them all again."""
