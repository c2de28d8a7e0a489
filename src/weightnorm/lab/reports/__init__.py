"""Records in, figures and tables and one page out."""
