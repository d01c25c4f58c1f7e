"""An ordinary user's way to root's CRIU: the socket of the privileged helper, and what is said there."""
