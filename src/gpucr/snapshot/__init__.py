"""The stored form of a job: a private folder with CRIU's images and a manifest that is written last."""
