"""What documents are removed by because of other documents, over all of them.

near_duplicates: signatures of documents, from which near copies are found
near_duplicate_search: the search for near copies in prepared folders, on disk
"""
