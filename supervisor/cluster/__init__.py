"""Jobs on Kubernetes: which pods form one, how it is supervised, and where its memory is kept."""
