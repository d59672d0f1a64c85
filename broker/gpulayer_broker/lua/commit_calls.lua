-- commit_calls: calls of a lane end, each by its own report, and the worker may claim for the slot that they leave.
-- Guarantee: as of commit, for each of them: only the holder of its current token, once. What the lane takes is noted with it.
-- Keys: root. Arguments: how many, then of each id, token, verdict (succeeded, failed, timed_out, cancelled), end reason, the
--   microseconds that it took (-1: it wrote something, its lane is for single calls; '' says nothing of the lane), n fields (name,
--   value, … as 2n values), then offer (0, 1 or 2, as in commit) and the offer.
-- Returns: {{verdict, …}, grants} with verdicts ok, already, stale or cancelled.

-- whether no call has a log, a watcher besides its submitter or a dependent: then nobody looks for them one by one
local function are_alone(P, calls)
  local keys = {}
  for n, call in ipairs(calls) do
    local attempt = string.match(call.report.token, '^%d+') or ''
    keys[3 * n - 2], keys[3 * n - 1] = P .. 'log:' .. call.id .. ':' .. attempt .. ':0', P .. 'watchers:' .. call.id
    keys[3 * n] = P .. 'after:' .. call.id
  end
  return redis.call('EXISTS', unpack(keys)) == 0
end

-- ends the calls; their verdicts, and of each worker whose calls ended whether they left a slot
local function report(P, calls, now)
  local verdicts, took, freed = {}, {}, {}
  local alone = are_alone(P, calls)
  for n, call in ipairs(calls) do
    local j = H.load(P, call.id)
    if j then j.is_alone = alone end
    verdicts[n] = j and j.parent ~= '' and 'stale' or H.report(P, j, call.report, now)
    if verdicts[n] == 'ok' or verdicts[n] == 'cancelled' then
      freed[j.worker] = freed[j.worker] or j.freed == true
      if call.us and j.lane ~= '' then
        took[j.lane] = took[j.lane] or {}
        table.insert(took[j.lane], call.us)
      end
    end
  end
  for lane, times in pairs(took) do H.note_lane(P, lane, times) end
  return verdicts, freed
end

register('commit_calls', {'allow-oom'}, function(K, A)
  local P, now, calls, i = K[1], H.now(), {}, 2
  if not (tonumber(A[1]) >= 1 and tonumber(A[1]) <= H.RIDE_MOST) then return H.refuse('calls', A[1] .. ' at once') end
  for n = 1, tonumber(A[1]) do
    local r, after = H.report_at(A, A[i + 1], A[i + 2], A[i + 3], '0', i + 5)
    if not r then return after end
    if r.verdict == 'retry' then return H.refuse('verdict', 'a call of a lane is not tried again by its report') end
    calls[n] = {id = A[i], us = tonumber(A[i + 4]), report = r}
    i = after
  end
  local verdicts, freed
  H.together(function() verdicts, freed = report(P, calls, now) end)
  for worker in pairs(freed) do redis.call('DEL', P .. 'deaths:' .. worker) end
  if A[i] ~= '1' then
    for worker, left in pairs(freed) do
      if left and A[i] ~= '2' then H.poke(P, worker, now) end
    end
    return {verdicts, {}}
  end
  local grants = H.claim(P, H.offer(A, i + 1), now)
  return {verdicts, grants[2] or {}, grants[1]}
end)
