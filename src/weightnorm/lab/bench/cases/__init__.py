"""One file per benchmark."""
