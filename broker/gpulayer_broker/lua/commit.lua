-- commit: one attempt ends, with everything that follows from it, and the worker may claim its next job in the same call.
-- Guarantee: only the holder of the current token commits, once; result, state, the log's end, what the attempt's middleware
--   enqueued, freed devices, waiters and the stream entry change together or not at all. A repeated commit answers `already`.
-- Keys: root. Arguments: id, token, verdict (succeeded, failed, timed_out, cancelled, retry), end reason, delay_ms,
--   n fields (name, value, … as 2n values; `barrier` is `<id> <k>`: the last k blocks are its callbacks), m submit blocks,
--   offer (0 or 1) and the offer.
-- Returns: {verdict, grants} with verdict ok, already, stale or cancelled; or {'introduce', signature}: nothing was changed.
local TAKES = {result = true, result_kind = true, error = true, outputs = true, usage = true, logs = true, options = true,
               retries = true, notes = true, barrier = true, keep_ms = true}

local VERDICTS = {succeeded = true, failed = true, timed_out = true, cancelled = true, retry = true}

local function fields_of(A, i)
  local fields, n = {}, 2 * tonumber(A[i])
  for k = 1, n do
    if k % 2 == 1 and not TAKES[A[i + k]] then return nil, nil, H.refuse('field', 'commit does not write ' .. A[i + k]) end
    fields[k] = A[i + k]
  end
  return fields, i + n + 1
end

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

-- a cancelled attempt keeps its logs, outputs and usage; what it came to no longer counts
local function beside_the_end(fields)
  local out = {}
  for i = 1, #fields, 2 do
    if fields[i] ~= 'error' and fields[i] ~= 'result' and fields[i] ~= 'result_kind' then
      out[#out + 1] = fields[i]
      out[#out + 1] = fields[i + 1]
    end
  end
  return out
end

local function end_attempt(P, j, A, fields, now)
  if A[3] == 'succeeded' then return H.finish(P, j, 'succeeded', '', fields, now) end
  if j.cancel ~= '' then
    H.finish(P, j, 'cancelled', 'cancelled', beside_the_end(fields), now)
    return 'cancelled'
  end
  if A[3] == 'retry' then return H.later(P, j, fields, tonumber(A[5]), now) end
  return H.finish(P, j, A[3], A[4], fields, now)
end

local function verdict_of(P, j, A, fields, blocks, now)
  if not H.holds(j, A[2]) then
    return j and A[2] ~= '' and j.ended_token == A[2] and 'already' or 'stale'
  end
  j.reported = true
  local ended = end_attempt(P, j, A, fields, now)
  redis.call('DEL', P .. 'deaths:' .. j.worker)
  for n = 1, #blocks - H.held_back(P, j, A[3], fields) do
    local b = blocks[n]
    -- one whose predecessor is gone ends at once, where it can be seen
    if not H.repeated(P, b) then H.create(P, b, H.gates(P, b) or {open = {}, failed = true}, now) end
  end
  return ended == 'cancelled' and 'cancelled' or 'ok'
end

register('commit', {'allow-oom'}, function(K, A)
  local P, now = K[1], H.now()
  if not VERDICTS[A[3]] or not tonumber(A[5]) then return H.refuse('verdict', A[3] .. ' after ' .. A[5] .. ' ms') end
  local fields, i, bad = fields_of(A, 6)
  if bad then return bad end
  local blocks, after, unknown, wrong = blocks_of(P, A, i)
  if wrong then return wrong end
  if unknown then return {'introduce', unknown} end
  local j = H.load(P, A[1])
  if j and j.parent ~= '' and A[3] == 'succeeded' then return H.refuse('verdict', 'a range of an array succeeds with its items') end
  local verdict = verdict_of(P, j, A, fields, blocks, now)
  if A[after] ~= '1' then
    if j and (verdict == 'ok' or verdict == 'cancelled') then H.poke(P, j.worker, now) end
    return {verdict, {}}
  end
  local grants = H.claim(P, H.offer(A, after + 1), now)
  return {verdict, grants[2] or {}, grants[1]}
end)
