"""The pictures of the documentation: ``python3 -m tests.docs.pictures`` makes them all again."""
