-- commit: one attempt ends, with everything that follows from it, and the worker may claim its next job in the same call.
-- Guarantee: only the holder of the current token commits, once; result, state, the log's end, what the attempt's middleware
--   enqueued, freed devices, waiters and the stream entry change together or not at all. A repeated commit answers `already`.
-- Keys: root. Arguments: id, token, verdict (succeeded, failed, timed_out, cancelled, retry), end reason, delay_ms,
--   n fields (name, value, … as 2n values; `barrier` is `<id> <k>`: the last k blocks are its callbacks), m submit blocks,
--   offer (0, 1, or 2 where the caller claims right after this call) and, with 1, the offer.
-- Returns: {verdict, grants} with verdict ok, already, stale or cancelled; or {'introduce', signature}: nothing was changed.
local function blocks_of(P, A, i)
  local blocks = {}
  for n = 1, tonumber(A[i]) do
    local b = H.block(A, i + 1 + (n - 1) * H.BLOCK)
    local wrong = H.wrong(b)
    if wrong then return nil, nil, nil, wrong end
    if not H.known(P, b.sig) then return nil, nil, b.sig end
    blocks[n] = b
  end
  return blocks, i + 1 + #blocks * H.BLOCK
end

register('commit', {'allow-oom'}, function(K, A)
  local P, now = K[1], H.now()
  local r, i = H.report_at(A, A[2], A[3], A[4], A[5], 6)
  if not r then return i end
  local blocks, after, unknown, wrong = blocks_of(P, A, i)
  if wrong then return wrong end
  if unknown then return {'introduce', unknown} end
  local j = H.load(P, A[1])
  if j and j.parent ~= '' and r.verdict == 'succeeded' then return H.refuse('verdict', 'a range of an array succeeds with its items') end
  local verdict = H.report(P, j, r, now)
  local ended = verdict == 'ok' or verdict == 'cancelled'
  if ended then
    redis.call('DEL', P .. 'deaths:' .. j.worker)
    for n = 1, #blocks - H.held_back(P, j, r.verdict, r.fields) do
      local b = blocks[n]
      -- one whose predecessor is gone ends at once, where it can be seen
      if not H.repeated(P, b) then H.create(P, b, H.gates(P, b) or {open = {}, failed = true}, now) end
    end
  end
  if A[after] ~= '1' then
    if ended and A[after] ~= '2' then H.poke(P, j.worker, now) end
    return {verdict, {}}
  end
  local grants = H.claim(P, H.offer(A, after + 1), now)
  return {verdict, grants[2] or {}, grants[1]}
end)
