-- commit_items: a chunk of an array ends, with the outcomes of the items that ran.
-- Guarantee: only the holder of the chunk's current token commits, once; the outcomes, the items that go back, the array's own
--   end, the waiters and the freed devices change together. Items that had not begun go back uncounted.
-- Keys: root. Arguments: chunk id, token, upto (items [from, upto) have outcomes), how many of them failed, microseconds
--   that they took, their outcomes (packed, opaque), offer (0, 1 or 2, as in commit) and the offer.
-- Returns: {verdict, grants} with verdict ok, already or stale.
register('commit_items', {'allow-oom'}, function(K, A)
  local P, now = K[1], H.now()
  local j, verdict = H.load(P, A[1]), 'stale'
  if H.holds(j, A[2]) and j.parent ~= '' then
    local upto = tonumber(A[3])
    if not upto or upto < tonumber(j.from) or upto > tonumber(j.to) then return H.refuse('items', 'upto ' .. A[3]) end
    j.reported = true
    H.end_items(P, j, upto, tonumber(A[4]), tonumber(A[5]), A[6], now)
    redis.call('DEL', P .. 'deaths:' .. j.worker)
    verdict = 'ok'
  elseif j and A[2] ~= '' and j.ended_token == A[2] then
    verdict = 'already'
  end
  if A[7] ~= '1' then
    if verdict == 'ok' and A[7] ~= '2' then H.poke(P, j.worker, now) end
    return {verdict, {}}
  end
  local grants = H.claim(P, H.offer(A, 8), now)
  return {verdict, grants[2] or {}, grants[1]}
end)
