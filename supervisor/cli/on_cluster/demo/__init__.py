"""`holdfast demo --cluster`: install Holdfast, cause each kind of fault in a job, and remove everything."""
