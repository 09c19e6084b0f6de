"""Writers killed at every line, and readers beside writers: nobody ever takes half for the whole."""
