"""One job on several nodes: all of its parts are dumped, or restored, together or not at all."""
